"""How two processes meet: listening, greetings, the proof of the token, control connections."""
