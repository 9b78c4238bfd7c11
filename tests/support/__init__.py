"""What tests and proofs share: a tiny model, runs that are started and waited for, comparisons, hosts as namespaces."""
