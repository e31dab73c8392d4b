"""One server's core, pure: its steps, its membership, its detector, and how it joins."""
