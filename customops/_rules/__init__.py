"""One module a transform: its record of what the user registered, and the trampoline that reads it when called."""
