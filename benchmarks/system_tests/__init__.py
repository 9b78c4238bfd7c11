"""System_tests."""
