"""Start processes, fresh or forked, that end with the process that started them; survive the crash of one; handle signals."""
