"""The papers' experiments and today's workloads, one readable script each."""
