"""fparallel beside its peers on one machine; see README.md."""
