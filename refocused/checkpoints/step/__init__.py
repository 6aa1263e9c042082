"""One saved step: written whole or not at all, verified, retained."""
