"""How ranks find and hear each other."""
