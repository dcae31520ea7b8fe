"""Operations of torch opened: what each is made of, products with parameters among it, by its definition."""
