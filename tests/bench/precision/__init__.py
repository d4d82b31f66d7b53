"""`make precision`: how accurate policies are on conversations that people have labelled."""
