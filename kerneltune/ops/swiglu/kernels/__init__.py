"""Device code of the gradient of SwiGLU."""
