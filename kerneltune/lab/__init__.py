"""Judge kerneltune itself: other tuners, replayed searches, noise of the measurement, planted slowdowns."""
