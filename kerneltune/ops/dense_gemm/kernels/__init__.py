"""Device code of products with dense weights."""
