"""Search the configs of a sweep on one or several GPUs, and renew stale configs."""
