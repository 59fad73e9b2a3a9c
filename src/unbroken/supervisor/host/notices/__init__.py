"""What a cloud says before it takes a machine away: one file for each provider."""
