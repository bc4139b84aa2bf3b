"""The command line: `fparallel train` and `fparallel lower`."""
