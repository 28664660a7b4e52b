"""What a person looks at: reports over the tables."""
