"""What authors of backends, devices and plug-ins need to test them."""
