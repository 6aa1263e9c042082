"""What a person types: one module a command, importing what it needs when it runs."""
