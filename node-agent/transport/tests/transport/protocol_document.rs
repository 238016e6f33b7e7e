//! The limits in `docs/PROTOCOL.md` are those of the code.

use reprise_transport::limits;

const DOCUMENT: &str = include_str!("../../../../docs/PROTOCOL.md");

#[test]
fn limits_in_the_document_match_the_code() {
    let limits: [(&str, u64); 11] = [
        ("BLOCKS_PER_REQUEST_MAX", limits::BLOCKS_PER_REQUEST_MAX as u64),
        ("KEYS_PER_OFFER_MAX", limits::KEYS_PER_OFFER_MAX as u64),
        ("REQUESTS_PER_CONNECTION_MAX", limits::REQUESTS_PER_CONNECTION_MAX as u64),
        ("BLOCKS_PER_CONNECTION_MAX", limits::BLOCKS_PER_CONNECTION_MAX as u64),
        ("SERVER_SLACK", limits::SERVER_SLACK as u64),
        ("DATA_FRAME_BYTES_MAX", limits::DATA_FRAME_BYTES_MAX),
        ("CREDIT_BYTES_MIN", limits::CREDIT_BYTES_MIN),
        ("CREDIT_BYTES_MAX", limits::CREDIT_BYTES_MAX),
        ("CREDIT_PARTS", limits::CREDIT_PARTS),
        ("REQUEST_DEADLINE_MAX", limits::REQUEST_DEADLINE_MAX.as_secs()),
        ("NODE_NAME_BYTES_MAX", limits::NODE_NAME_BYTES_MAX as u64),
    ];
    for (name, value) in limits {
        let row = format!("| `{name}` | {value} |");
        assert!(DOCUMENT.contains(&row), "docs/PROTOCOL.md lacks: {row}");
    }
}
