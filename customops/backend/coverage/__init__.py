"""What torch's own tests of ops say of a device: which ops run in a kernel of it, by fallback, or not."""
