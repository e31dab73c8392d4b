"""The live page of a job: pure layout and model, and a web server that the launcher or a command runs."""
