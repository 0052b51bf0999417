"""What a token costs a model: `estimate` reads it from the files, `capability` gives it to every model. See README.md."""
