"""The log's tables and statements.

    head          one row: the log's id, the number and digest of its newest record
    records       number, digest and bytes; partitioned by number, because dropping a partition is
                  the only way to remove many rows that leaves nothing to clean up
    partitions    which there are
    replicas      what replicas report

`replication init` makes all of it, as a role that may. The hub's own role can only add records,
move the head, and call the two functions that add and drop partitions.
"""

from __future__ import annotations

from typing import Final

from psycopg import sql

__all__ = [
    "CONFIRM",
    "LAYOUT",
    "LOOK",
    "OFFER",
    "PARTITION_RECORDS",
    "Statements",
    "creation",
    "grants",
]

OFFER: Final = b"crosswire_offer"
CONFIRM: Final = b"crosswire_confirm"
LOOK: Final = b"crosswire_look"
LAYOUT: Final = 1
"""The version of these tables."""
PARTITION_RECORDS: Final = 4096
"""Records per partition, by default: what is trimmed at once."""

_CREATE: Final = """
CREATE SCHEMA {schema};
CREATE TABLE {schema}.head (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    layout integer NOT NULL,
    log_id bytea NOT NULL,
    number bigint NOT NULL,
    digest bytea NOT NULL,
    confirmations bigint NOT NULL DEFAULT 0,
    partition_records bigint NOT NULL
) WITH (fillfactor = 20);
CREATE TABLE {schema}.records (
    number bigint PRIMARY KEY,
    digest bytea NOT NULL,
    data bytea NOT NULL
) PARTITION BY RANGE (number);
ALTER TABLE {schema}.records ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE {schema}.partitions (first bigint PRIMARY KEY, stop bigint NOT NULL);
CREATE TABLE {schema}.replicas (
    name text PRIMARY KEY,
    writer bytea NOT NULL,
    state bytea NOT NULL,
    reported_at timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE FUNCTION {schema}.add_partitions(upto bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    ends bigint := coalesce((SELECT max(stop) FROM partitions), 0);
    size bigint := (SELECT partition_records FROM head);
BEGIN
    -- A wrong argument must not make partitions without end.
    IF upto > ends + 64 * size THEN
        RAISE EXCEPTION 'records up to % are too far ahead', upto;
    END IF;
    WHILE ends <= upto LOOP
        EXECUTE format('CREATE TABLE %I PARTITION OF records FOR VALUES FROM (%s) TO (%s)',
                       'records_' || ends, ends, ends + size);
        INSERT INTO partitions VALUES (ends, ends + size);
        ends := ends + size;
    END LOOP;
    RETURN ends;
END $$;

CREATE FUNCTION {schema}.trim_records(upto bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
    part record;
    newest bigint := (SELECT number FROM head);
BEGIN
    FOR part IN
        SELECT first FROM partitions WHERE stop <= least(upto + 1, newest) ORDER BY first LIMIT 16
    LOOP
        EXECUTE format('DROP TABLE %I', 'records_' || part.first);
        DELETE FROM partitions WHERE first = part.first;
    END LOOP;
    RETURN (SELECT min(number) FROM records);
END $$;

REVOKE ALL ON FUNCTION {schema}.add_partitions(bigint) FROM PUBLIC;
REVOKE ALL ON FUNCTION {schema}.trim_records(bigint) FROM PUBLIC;
"""

_GRANT: Final = """
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, UPDATE (number, digest, confirmations) ON {schema}.head TO {role};
GRANT SELECT, INSERT ON {schema}.records TO {role};
GRANT SELECT ON {schema}.partitions TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.replicas TO {role};
GRANT EXECUTE ON FUNCTION {schema}.add_partitions(bigint) TO {role};
GRANT EXECUTE ON FUNCTION {schema}.trim_records(bigint) TO {role};
"""

# What the answer to an append depends on, besides the append itself. The timeline is that of the
# WAL that is being written; the one of the control file lags after a promotion.
_FACTS: Final = """
    (SELECT system_identifier::text FROM pg_control_system()) AS system,
    ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer AS timeline,
    current_setting('synchronous_standby_names') AS standby_names,
    current_setting('synchronous_commit') AS commit_level,
    current_setting('fsync') AS fsync,
    current_setting('transaction_read_only') AS read_only,
    pg_conf_load_time()::text AS loaded_at,
    extract(epoch FROM clock_timestamp() - pg_conf_load_time())::text AS loaded_s
"""

_LOOK: Final = """
SELECT layout, log_id, number, digest, {facts} FROM {schema}.head
"""

# One statement: compared, set and inserted together or not at all. A second writer waits at the
# row of the head until the first has committed, and then finds another head.
_OFFER: Final = """
PREPARE crosswire_offer (bytea, bigint, bytea, bytea, bytea) AS
WITH moved AS (
    UPDATE {schema}.head SET number = $2, digest = $3
    WHERE log_id = $1 AND number = $2 - 1 AND digest = $4
    RETURNING layout, log_id, number, digest
), added AS (
    INSERT INTO {schema}.records (number, digest, data)
    SELECT number, digest, $5 FROM moved RETURNING number
)
SELECT layout, log_id, moved.number, digest, {facts} FROM moved JOIN added USING (number)
"""

# A write, so that there is something to wait for: what it changes is of no use to anybody.
_CONFIRM: Final = """
PREPARE crosswire_confirm (bytea, bigint, bytea) AS
UPDATE {schema}.head SET confirmations = confirmations + 1
WHERE log_id = $1 AND number = $2 AND digest = $3
RETURNING layout, log_id, number, digest, {facts}
"""

# Sizes of long values are known without reading them, so the page is cut before they are read.
_FETCH: Final = """
WITH seen AS MATERIALIZED (
    SELECT layout, log_id, number, digest,
        (SELECT min(number) FROM {schema}.records) AS first, {facts}
    FROM {schema}.head
), page AS (
    SELECT number, data FROM (
        SELECT number, data,
            sum(octet_length(data)) OVER (ORDER BY number) - octet_length(data) AS before_bytes
        FROM (
            SELECT number, data FROM {schema}.records
            WHERE number > %(after)b::bigint ORDER BY number LIMIT 1000
        ) AS following
    ) AS sized WHERE before_bytes < %(limit_bytes)b::bigint
)
SELECT seen.*, page.data FROM seen LEFT JOIN page ON true ORDER BY page.number
"""

_EXTENT: Final = """
SELECT (SELECT min(number) FROM {schema}.records),
    coalesce(sum(pg_total_relation_size(inhrelid)), 0)::bigint
FROM pg_inherits WHERE inhparent = {table}::regclass
"""

_PARTITIONS: Final = (
    "SELECT max(stop), (SELECT partition_records FROM {schema}.head) FROM {schema}.partitions"
)
_ADD_PARTITIONS: Final = "SELECT {schema}.add_partitions(%(upto)b::bigint)"
_TRIM: Final = "SELECT {schema}.trim_records(%(upto)b::bigint)"

_REPORT: Final = """
INSERT INTO {schema}.replicas AS known (name, writer, state, reported_at)
VALUES (%(name)b, %(writer)b, %(state)b, clock_timestamp())
ON CONFLICT (name) DO UPDATE
SET writer = excluded.writer, state = excluded.state, reported_at = excluded.reported_at
WHERE known.writer = excluded.writer
    OR known.reported_at < excluded.reported_at - make_interval(secs => %(taken_s)b::float8)
RETURNING name
"""

_REPLICAS: Final = """
SELECT state, greatest(extract(epoch FROM clock_timestamp() - reported_at), 0)::float8
FROM {schema}.replicas ORDER BY name COLLATE "C"
"""

_REMOVE: Final = "DELETE FROM {schema}.replicas WHERE name = %(name)b RETURNING name"


class Statements:
    """The statements for the tables of one schema."""

    def __init__(self, schema: str) -> None:
        self.look = _composed(_LOOK, schema)
        self.prepared = [
            _composed(text, schema)
            for text in (_OFFER, _CONFIRM, f"PREPARE crosswire_look AS{_LOOK}")
        ]
        """Make the statements OFFER, CONFIRM and LOOK of a connection that appends."""
        self.fetch = _composed(_FETCH, schema)
        self.extent = _composed(_EXTENT, schema)
        self.partitions = _composed(_PARTITIONS, schema)
        self.add_partitions = _composed(_ADD_PARTITIONS, schema)
        self.trim = _composed(_TRIM, schema)
        self.report = _composed(_REPORT, schema)
        self.replicas = _composed(_REPLICAS, schema)
        self.remove = _composed(_REMOVE, schema)


def creation(schema: str) -> sql.Composed:
    """Makes the tables, empty."""
    return _composed(_CREATE, schema)


def grants(schema: str, role: str) -> sql.Composed:
    """Gives the hub's role what it needs and no more."""
    return sql.SQL(_GRANT).format(schema=sql.Identifier(schema), role=sql.Identifier(role))


def _composed(text: str, schema: str) -> sql.Composed:
    return sql.SQL(text).format(
        schema=sql.Identifier(schema),
        facts=sql.SQL(_FACTS),
        table=sql.Literal(f"{schema}.records"),
    )
