"""Cases as data that any implementation of GRPO's objectives can be checked against; see README.md."""
