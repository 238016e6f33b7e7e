//! Tests of every CEL rule with valid and invalid objects, evaluated as in the API server: defaults first, then
//! rules; updates have the old and the new object.
//!
//! Objects are those that a user would write: a minimal object of the kind and a merge patch. A rejected object
//! violates exactly one rule, so that the table documents each rule. All objects satisfy the rest of the schema.
//! Accepted objects are parsed into the Rust type and serialized unchanged.

use std::collections::BTreeSet;

use kube::core::cel::{Validator, compile_schema, estimate_rule_cost};
use reprise_crds::definitions::{definitions, schema};
use serde_json::Value;

mod cases;
mod cluster;
mod node;
mod others;
mod pool;
mod structure;

use cases::{Case, Table};

fn tables() -> Vec<Table> {
    vec![cluster::table(), pool::table(), others::queues(), others::slack(), others::tenant(), node::table()]
}

fn schema_of(kind: &str) -> Value {
    let definitions = definitions();
    schema(
        definitions
            .iter()
            .find(|definition| definition.spec.names.kind == kind)
            .expect("the kind is defined"),
    )
}

/// Returns the rules that a case violates, as their text and message.
fn broken(schema: &Value, table: &Table, case: &Case) -> Vec<(String, String)> {
    let old = case.old.as_ref().map(|patch| table.object(patch));
    match Validator::new().validate(schema, &table.object(&case.patch), old.as_ref()) {
        Ok(()) => Vec::new(),
        Err(errors) => errors.iter().map(|error| (error.rule.clone(), error.message.clone())).collect(),
    }
}

fn rules_below(schema: &Value, found: &mut BTreeSet<(String, String)>) {
    for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
        let text = |keyword: &str| rule[keyword].as_str().unwrap_or_default().to_owned();
        found.insert((text("rule"), text("message")));
    }
    for property in schema["properties"].as_object().into_iter().flat_map(|properties| properties.values()) {
        rules_below(property, found);
    }
    for inner in ["items", "additionalProperties"] {
        if schema.get(inner).is_some_and(Value::is_object) {
            rules_below(&schema[inner], found);
        }
    }
}

#[test]
fn accepts_and_parses_objects_that_satisfy_all_rules() {
    for table in tables() {
        let schema = schema_of(table.kind);
        let accepted = table.cases.iter().filter(|case| case.refused.is_none());
        let mut count = 0;
        for case in accepted {
            assert_eq!(broken(&schema, &table, case), [], "{}: {}", table.kind, case.what);
            let object = structure::with_defaults(&schema, &table.object(&case.patch));
            let back = (table.round_trip)(object.clone());
            assert_eq!(back.unwrap_or_else(|error| panic!("{}: {}: {error}", table.kind, case.what)), object);
            count += 1;
        }
        assert!(count > 0, "{}: the table has no accepted object", table.kind);
    }
}

#[test]
fn rejects_an_invalid_object_with_the_message_of_one_rule() {
    for table in tables() {
        let schema = schema_of(table.kind);
        for case in &table.cases {
            let Some(words) = case.refused else { continue };
            let broken = broken(&schema, &table, case);
            assert_eq!(broken.len(), 1, "{}: {}: {broken:#?}", table.kind, case.what);
            assert!(broken[0].1.contains(words), "{}: '{words}' is not in '{}'", table.kind, broken[0].1);
        }
    }
}

#[test]
fn all_objects_satisfy_the_schema_apart_from_rules() {
    for table in tables() {
        let schema = schema_of(table.kind);
        for case in &table.cases {
            for patch in case.old.iter().chain([&case.patch]) {
                let object = structure::with_defaults(&schema, &table.object(patch));
                let violations = structure::violations(&schema, &object);
                assert!(violations.is_empty(), "{}: {}: {violations:#?}", table.kind, case.what);
            }
        }
    }
}

#[test]
fn schema_rejects_values_out_of_bounds() {
    for table in tables() {
        let schema = schema_of(table.kind);
        assert!(!table.out_of_bounds.is_empty(), "{}: the table tests no bounds", table.kind);
        for (path, patch) in &table.out_of_bounds {
            let object = structure::with_defaults(&schema, &table.object(patch));
            let violations = structure::violations(&schema, &object);
            let at_path = violations.iter().all(|violation| violation.starts_with(&format!("{path}: ")));
            assert!(!violations.is_empty() && at_path, "{}: {path}: {violations:#?}", table.kind);
        }
    }
}

#[test]
fn every_rule_rejects_an_object_of_the_tables() {
    let tables = tables();
    for definition in definitions() {
        let kind = definition.spec.names.kind.clone();
        let table = tables.iter().find(|table| table.kind == kind).expect("every kind has a table");
        let schema = schema(&definition);
        let mut rules = BTreeSet::new();
        rules_below(&schema, &mut rules);
        assert!(!rules.is_empty(), "{kind}: no rules");
        for case in &table.cases {
            for rule in broken(&schema, table, case) {
                rules.remove(&rule);
            }
        }
        assert!(rules.is_empty(), "{kind}: these rules reject no object of the table: {rules:#?}");
    }
}

#[test]
fn every_rule_compiles_has_a_remedy_and_stays_in_the_cost_budget() {
    for definition in definitions() {
        let kind = &definition.spec.names.kind;
        let schema = schema(&definition);
        let compiled = compile_schema(&schema);
        assert!(!compiled.has_errors(), "{kind}: {:?}", compiled.compilation_errors());
        let mut rules = BTreeSet::new();
        rules_below(&schema, &mut rules);
        for (rule, message) in &rules {
            let has_remedy = message.contains(": ") || message.contains(" is ");
            assert!(
                has_remedy && message.len() < 200 && !message.contains('\n'),
                "{kind}: '{message}' has no remedy or is too long"
            );
            let costs = estimate_rule_cost(rule, &compiled);
            assert!(costs.is_empty(), "{kind}: {rule}: {costs:?}");
        }
        let messages: BTreeSet<&String> = rules.iter().map(|(_, message)| message).collect();
        assert_eq!(messages.len(), rules.len(), "{kind}: two rules have the same message");
    }
}
