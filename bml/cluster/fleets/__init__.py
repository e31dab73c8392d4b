"""The processes of a job on one machine: started, asked, killed; and what every launcher needs of them."""
