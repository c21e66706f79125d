"""The Spark data source `crosswire`: reads and writes messages of a running hub."""
