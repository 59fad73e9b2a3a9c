"""Contract suites, fault injection and equality of runs, shipped so that extensions can use them."""
