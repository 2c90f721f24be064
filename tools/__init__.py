"""What is used on the repository and is no part of the package."""
