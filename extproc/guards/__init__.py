"""What can stop a request, one file for each kind of guard."""
