"""Device code of the routing operators."""
