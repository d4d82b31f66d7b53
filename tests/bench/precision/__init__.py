"""`make precision`: how accurate policies are on labelled conversations."""
