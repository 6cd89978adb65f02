"""Start processes, fresh or forked, that end with the process that started them and may crash; handle signals."""
