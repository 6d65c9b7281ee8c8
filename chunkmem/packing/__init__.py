"""Models are built, on ranks or on the meta device, and their parameters are packed into chunks."""
