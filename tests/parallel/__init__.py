"""Context parallelism against one rank."""
