//! The printed default, and errors of the text.

use super::*;

#[test]
fn printed_default_parses_to_the_default_and_is_valid() {
    let parsed = Config::parse(&Config::default_text()).expect("the default text parses");
    assert_eq!(parsed, Config::default());
    parsed.validate().expect("the default is valid");
}

#[test]
fn unknown_fields_and_invalid_sizes_are_rejected_with_their_name() {
    let error = Config::parse("[arena]\nbites = \"1GiB\"").expect_err("unknown field").to_string();
    assert!(error.contains("bites"), "{error}");
    let error = Config::parse("[arena]\nbytes = \"much\"").expect_err("invalid size").to_string();
    assert!(error.contains("much") && error.contains("GiB"), "{error}");
}
