"""Pure data, errors, contracts and plug-ins: what every other room may import."""
