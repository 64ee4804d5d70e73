"""Every way to train the same model behind one interface; see `baselines.system`."""
