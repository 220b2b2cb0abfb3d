"""What should happen: which values leave the device, within which budget, and why."""
