"""Hidden states of corpus samples, for offline training of EAGLE-3 and DFlash drafts.

`plan` says what and how large, `choice` which samples; `capture` sends them through the servers, `wire`
reads the replies, `tensor_file` and `store` keep them.
"""
