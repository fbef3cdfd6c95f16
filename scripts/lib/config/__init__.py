"""Every setting with its checks, and what each stage depends on."""
