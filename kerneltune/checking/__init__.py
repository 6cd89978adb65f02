"""Check variants against the reference, and find the cases, configs and addresses on which a wrong kernel shows itself."""
