"""Search the configs of a sweep on one or several GPUs, and time and judge configs that are known."""
