"""From the trainer's memory to the disk: shared memory, and a process that outlives the trainer."""
