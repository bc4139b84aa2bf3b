"""Running schedules: executors, transports, and the functions that segments become."""
