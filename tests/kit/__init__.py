"""Scenes and instruments that tests of several folders use."""
