"""What a user has and wants: frozen, validated values."""
