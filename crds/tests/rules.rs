//! Every CEL rule on objects that keep it and that break it, as the API server would evaluate it: defaults first, then rules,
//! and on updates the old object beside the new one.
//!
//! Objects are what a user writes: a minimal object of the kind and a merge patch. A refused object breaks exactly one rule, so
//! that the table says what each rule does; whatever the rules say, objects keep the rest of the schema, and accepted ones are
//! read into the Rust type and written back unchanged.

use std::collections::BTreeSet;

use kube::core::cel::{Validator, compile_schema, estimate_rule_cost};
use reprise_crds::definitions::{definitions, schema};
use serde_json::Value;

#[path = "rules/cases.rs"]
mod cases;
#[path = "rules/cluster.rs"]
mod cluster;
#[path = "rules/node.rs"]
mod node;
#[path = "rules/others.rs"]
mod others;
#[path = "rules/pool.rs"]
mod pool;
#[path = "rules/structure.rs"]
mod structure;

use cases::{Case, Table};

fn tables() -> Vec<Table> {
    vec![cluster::table(), pool::table(), others::queues(), others::slack(), others::tenant(), node::table()]
}

fn schema_of(kind: &str) -> Value {
    let definitions = definitions();
    schema(definitions.iter().find(|definition| definition.spec.names.kind == kind).expect("a kind of ours"))
}

/// Rules that a case breaks, as their text and message.
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
fn objects_that_keep_all_rules_are_accepted_and_read() {
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
        assert!(count > 0, "{}: nothing is accepted", table.kind);
    }
}

#[test]
fn an_object_that_breaks_a_rule_is_refused_with_the_words_of_that_rule_alone() {
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
fn every_object_of_the_tables_keeps_the_rest_of_its_schema() {
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
fn values_out_of_bounds_are_refused_by_the_schema_itself() {
    for table in tables() {
        let schema = schema_of(table.kind);
        assert!(!table.out_of_bounds.is_empty(), "{}: no bounds are tried", table.kind);
        for (path, patch) in &table.out_of_bounds {
            let object = structure::with_defaults(&schema, &table.object(patch));
            let violations = structure::violations(&schema, &object);
            let told = violations.iter().all(|violation| violation.starts_with(&format!("{path}: ")));
            assert!(!violations.is_empty() && told, "{}: {path}: {violations:#?}", table.kind);
        }
    }
}

#[test]
fn every_rule_of_the_schemas_refuses_an_object_of_the_tables() {
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
        assert!(rules.is_empty(), "{kind}: no object of the table is refused by {rules:#?}");
    }
}

#[test]
fn every_rule_compiles_says_what_to_do_and_costs_little() {
    for definition in definitions() {
        let kind = &definition.spec.names.kind;
        let schema = schema(&definition);
        let compiled = compile_schema(&schema);
        assert!(!compiled.has_errors(), "{kind}: {:?}", compiled.compilation_errors());
        let mut rules = BTreeSet::new();
        rules_below(&schema, &mut rules);
        for (rule, message) in &rules {
            let told = message.contains(": ") || message.contains(" is ");
            assert!(
                told && message.len() < 200 && !message.contains('\n'),
                "{kind}: '{message}' says nothing to do"
            );
            let costs = estimate_rule_cost(rule, &compiled);
            assert!(costs.is_empty(), "{kind}: {rule}: {costs:?}");
        }
        let messages: BTreeSet<&String> = rules.iter().map(|(_, message)| message).collect();
        assert_eq!(messages.len(), rules.len(), "{kind}: two rules have one message");
    }
}
