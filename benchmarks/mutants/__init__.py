"""Single bugs that a generator plants into kit, and the tests' answer."""
