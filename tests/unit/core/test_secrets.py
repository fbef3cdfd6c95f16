from scripts.lib.core.secrets import without_secrets


def test_shown_urls_hold_no_secrets():
    assert without_secrets("https://me:pw@host:8/a/b.csv?X-Amz-Signature=x#y") == "https://host:8/a/b.csv"
    assert without_secrets("s3://bucket/a b.parquet") == "s3://bucket/a b.parquet"
