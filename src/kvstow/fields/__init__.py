"""Types of settings' fields, and their values as users write and read them."""
