"""The target model as its tokens see it: tokenizer, chat template, what its ids say."""
