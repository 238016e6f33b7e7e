//! Invariants of all definitions: no drift, descriptions, bounds, conditions.

use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use reprise_crds::definitions::{definitions, schema};
use reprise_crds::generated::{self, Drift};
use reprise_crds::{CATEGORY, GROUP, VERSION};
use serde_json::{Value, json};

/// Upper bound on the size of a definition: Helm stores all of them in one release Secret of at most 1 MiB.
const DEFINITION_BYTES_MAX: usize = 64 << 10;

fn root() -> PathBuf {
    generated::repository_above(Path::new(env!("CARGO_MANIFEST_DIR")))
        .expect("the crate is in the repository")
}

/// Calls `visit` with a schema and every schema below it, and their paths.
fn walk(path: &str, schema: &Value, visit: &mut impl FnMut(&str, &Value)) {
    visit(path, schema);
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        walk(&format!("{path}.{name}"), property, visit);
    }
    for (inner, mark) in [("items", "[]"), ("additionalProperties", ".*")] {
        if schema.get(inner).is_some() {
            walk(&format!("{path}{mark}"), &schema[inner], visit);
        }
    }
}

fn assert_none(rule: &str, offenders: &[String]) {
    assert!(offenders.is_empty(), "{rule}:\n  {}", offenders.join("\n  "));
}

/// Checks every schema of every kind, and lists those for which `offends` returns true.
fn each(rule: &str, offends: impl Fn(&str, &Value) -> bool) {
    let mut offenders = Vec::new();
    for definition in definitions() {
        walk(&definition.spec.names.kind, &schema(&definition), &mut |path, schema| {
            if offends(path, schema) {
                offenders.push(format!("{path}: {schema}"));
            }
        });
    }
    assert_none(rule, &offenders);
}

#[test]
fn generated_files_match_the_types() {
    let drift = generated::drift(&root()).expect("the repository can be read");
    assert_eq!(drift, [], "run `cargo run -p reprise-crds --bin crdgen` and commit the files");
}

#[test]
fn reports_and_repairs_drift() {
    let scratch = tempfile::tempdir().expect("a folder");
    let root = scratch.path();
    let all = generated::files().len();
    let missing = generated::drift(root).expect("read");
    assert_eq!(missing.len(), all);
    assert!(missing.iter().all(|drift| matches!(drift, Drift::Missing(_))), "{missing:?}");
    assert_eq!(generated::write(root).expect("written").len(), all);
    assert_eq!(generated::drift(root).expect("read"), []);

    let changed = Path::new(generated::DEFINITIONS_FOLDER).join("ssdpools.yaml");
    let text = std::fs::read_to_string(root.join(&changed)).expect("read");
    std::fs::write(root.join(&changed), text.replacen("kind: CustomResourceDefinition", "kind: Other", 1))
        .expect("written");
    let stray = Path::new(generated::DEFINITIONS_FOLDER).join("olds.yaml");
    let stray_page = Path::new(generated::REFERENCE_FOLDER).join("old.md");
    for path in [&stray, &stray_page] {
        std::fs::write(root.join(path), "").expect("written");
    }
    let drift = generated::drift(root).expect("read");
    let line = text.lines().position(|line| line == "kind: CustomResourceDefinition").expect("there") + 1;
    assert_eq!(
        drift,
        [Drift::Differs(changed, line), Drift::Superfluous(stray), Drift::Superfluous(stray_page)]
    );
    assert!(drift[0].to_string().contains(&format!("line {line}")), "{}", drift[0]);
    generated::write(root).expect("written");
    assert_eq!(generated::drift(root).expect("read"), []);
}

#[test]
fn chart_definitions_differ_by_the_keep_annotation_only() {
    let files = generated::files();
    for definition in definitions() {
        let name = format!("{}.yaml", definition.spec.names.plural);
        let read = |folder: &str| -> Value {
            serde_yaml_ng::from_str(&files[&Path::new(folder).join(&name)]).expect("YAML")
        };
        let mut kept = read(generated::CHART_DEFINITIONS_FOLDER);
        let annotations =
            kept["metadata"].as_object_mut().and_then(|metadata| metadata.remove("annotations"));
        assert_eq!(annotations, Some(json!({ "helm.sh/resource-policy": "keep" })), "{name}");
        assert_eq!(kept, read(generated::DEFINITIONS_FOLDER), "{name}");
    }
}

#[test]
fn crdgen_runs_in_any_folder_and_fails_on_drift() {
    let check = |folder: &Path| {
        let output = Command::new(env!("CARGO_BIN_EXE_crdgen"))
            .arg("--check")
            .current_dir(folder)
            .output()
            .expect("runs");
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).expect("text"))
    };
    for folder in ["", "crds/src", "docs/adr"] {
        let (code, text) = check(&root().join(folder));
        assert_eq!((code, text.as_str()), (Some(0), "no drift: 20 files\n"), "{folder}");
    }
    let scratch = tempfile::tempdir().expect("a folder");
    let (code, text) = check(scratch.path());
    assert!(code == Some(1) && text.contains("not in a checkout"), "{text}");

    std::fs::create_dir(scratch.path().join("crds")).expect("made");
    std::fs::write(scratch.path().join("crds/Cargo.toml"), "").expect("written");
    generated::write(scratch.path()).expect("written");
    assert_eq!(check(scratch.path()).0, Some(0));
    let page = Path::new(generated::REFERENCE_FOLDER).join("ssdpool.md");
    std::fs::remove_file(scratch.path().join(&page)).expect("removed");
    let (code, text) = check(scratch.path());
    assert!(
        code == Some(1)
            && text.contains("docs/resources/ssdpool.md: is missing")
            && text.contains("cargo run"),
        "{text}"
    );
    assert!(!scratch.path().join(&page).exists(), "a check writes nothing");
}

#[test]
fn definition_file_parses_to_the_same_definition() {
    let files = generated::files();
    for definition in definitions() {
        let path =
            Path::new(generated::DEFINITIONS_FOLDER).join(format!("{}.yaml", definition.spec.names.plural));
        let read: CustomResourceDefinition = serde_yaml_ng::from_str(&files[&path]).expect("YAML");
        assert_eq!(read, definition);
    }
}

#[test]
fn names_scopes_and_short_names_match_the_documentation() {
    let found: Vec<(String, String, String, String)> = definitions()
        .into_iter()
        .map(|definition| {
            let names = definition.spec.names;
            assert_eq!(definition.spec.group, GROUP);
            assert_eq!(definition.spec.versions.len(), 1);
            assert_eq!(definition.spec.versions[0].name, VERSION);
            assert_eq!(names.categories, Some(vec![CATEGORY.to_owned()]));
            assert_eq!(definition.metadata.name, Some(format!("{}.{GROUP}", names.plural)));
            (names.kind, names.plural, names.short_names.expect("one").join(","), definition.spec.scope)
        })
        .collect();
    let expected = [
        ("KVCacheCluster", "kvcacheclusters", "kvcc", "Namespaced"),
        ("SSDPool", "ssdpools", "ssdp", "Cluster"),
        ("GPUQueueAllocation", "gpuqueueallocations", "gqa", "Namespaced"),
        ("SlackProfile", "slackprofiles", "slack", "Namespaced"),
        ("CacheTenant", "cachetenants", "ctenant", "Cluster"),
        ("CacheNode", "cachenodes", "cnode", "Cluster"),
    ]
    .map(|(kind, plural, short, scope)| {
        (kind.to_owned(), plural.to_owned(), short.to_owned(), scope.to_owned())
    });
    assert_eq!(found, expected);
}

#[test]
fn every_field_has_a_description_in_sentences() {
    each("a field has a description in sentences", |path, schema| {
        // Kubernetes describes metadata; the description of a list or map covers its items and values.
        let ours = path.contains(".spec.") || path.contains(".status.");
        let whole = !path.ends_with("[]") && !path.ends_with(".*");
        let description = schema["description"].as_str().unwrap_or_default();
        ours && whole && (description.len() < 8 || !description.ends_with('.') || description.contains('\n'))
    });
}

#[test]
fn every_text_list_and_map_has_an_upper_bound() {
    each("texts, lists and maps have an upper bound, which limits the cost of CEL rules", |_, schema| {
        match schema["type"].as_str() {
            Some("string") => {
                schema.get("maxLength").is_none()
                    && schema.get("enum").is_none()
                    && schema["format"] != "date-time"
            }
            Some("array") => schema.get("maxItems").is_none(),
            Some("object") => {
                schema.get("additionalProperties").is_some() && schema.get("maxProperties").is_none()
            }
            _ => false,
        }
    });
}

#[test]
fn schemas_are_structural_and_closed() {
    each("no unknown fields, no combinators, no null", |path, schema| {
        let open = [
            "x-kubernetes-preserve-unknown-fields",
            "anyOf",
            "oneOf",
            "allOf",
            "not",
            "nullable",
            "$ref",
            "title",
        ];
        let typed = schema["type"].is_string() || path.ends_with(".metadata");
        open.iter().any(|keyword| schema.get(keyword).is_some()) || !typed
    });
    each("every format is known to Kubernetes", |_, schema| {
        schema
            .get("format")
            .is_some_and(|format| !["int32", "int64", "date-time"].iter().any(|known| format == known))
    });
}

#[test]
fn transition_rules_are_outside_of_atomic_lists() {
    each("the API server has no oldSelf in lists that are replaced as a whole", |path, schema| {
        let rules = schema["x-kubernetes-validations"].as_array().into_iter().flatten();
        path.contains("[]")
            && rules.into_iter().any(|rule| rule["rule"].as_str().unwrap_or_default().contains("oldSelf"))
    });
}

#[test]
fn keys_of_list_maps_are_required_fields_of_their_items() {
    each("a key of a list-map is a required field, or has a default", |_, schema| {
        let keys = schema["x-kubernetes-list-map-keys"].as_array().into_iter().flatten();
        let required = schema["items"]["required"].as_array().cloned().unwrap_or_default();
        keys.into_iter().any(|key| !required.contains(key))
    });
}

#[test]
fn conditions_are_a_list_map_by_type_and_carry_their_generation() {
    for definition in definitions() {
        let kind = &definition.spec.names.kind;
        let version = &definition.spec.versions[0];
        assert!(
            version.subresources.as_ref().is_some_and(|parts| parts.status.is_some()),
            "{kind}: no status"
        );
        let status = schema(&definition)["properties"]["status"].clone();
        assert_eq!(status["properties"]["observedGeneration"]["type"], "integer", "{kind}");
        let conditions = &status["properties"]["conditions"];
        assert_eq!(conditions["x-kubernetes-list-type"], "map", "{kind}");
        assert_eq!(conditions["x-kubernetes-list-map-keys"], json!(["type"]), "{kind}");
        let fields = &conditions["items"]["properties"];
        for field in ["type", "status", "observedGeneration", "lastTransitionTime", "reason", "message"] {
            assert!(fields.get(field).is_some(), "{kind}: conditions have no {field}");
        }
    }
}

#[test]
fn printer_columns_show_conditions_and_age() {
    for definition in definitions() {
        let kind = &definition.spec.names.kind;
        let schema = schema(&definition);
        let columns = definition.spec.versions[0].additional_printer_columns.clone().expect("columns");
        assert!(columns.iter().any(|column| column.json_path.contains("conditions")), "{kind}");
        assert_eq!(columns.last().map(|column| column.name.as_str()), Some("Age"), "{kind}");
        for column in columns
            .iter()
            .filter(|column| column.json_path.starts_with(".spec") || column.json_path.starts_with(".status"))
        {
            let path = column.json_path.split('[').next().expect("a path");
            let found = path
                .trim_start_matches('.')
                .split('.')
                .fold(&schema, |schema, name| &schema["properties"][name]);
            assert!(found.is_object(), "{kind}: column {} shows {path}, which is not a field", column.name);
        }
    }
}

#[test]
fn node_objects_are_selectable_by_node_name() {
    for definition in definitions() {
        let selectable = definition.spec.versions[0].selectable_fields.clone().unwrap_or_default();
        let paths: Vec<&str> = selectable.iter().map(|field| field.json_path.as_str()).collect();
        let expected: &[&str] = match definition.spec.names.kind.as_str() {
            "GPUQueueAllocation" | "CacheNode" => &[".spec.nodeName"],
            _ => &[],
        };
        assert_eq!(paths, expected, "{}", definition.spec.names.kind);
    }
}

#[test]
fn schemas_contain_default_values() {
    let of = |kind: &str| {
        let definitions = definitions();
        schema(definitions.iter().find(|definition| definition.spec.names.kind == kind).expect("a kind"))
    };
    let cluster = of("KVCacheCluster");
    let spec = &cluster["properties"]["spec"]["properties"];
    assert_eq!(spec["etcd"]["default"]["mode"], "Managed");
    assert_eq!(spec["etcd"]["properties"]["keyPrefix"]["default"], "/reprise/");
    assert_eq!(spec["controlPlane"]["properties"]["replicas"]["default"], 2);
    let writeback = json!({"delay": "50ms", "size": "64Mi", "slackDelay": "1s"});
    assert_eq!(spec["cache"]["properties"]["writeback"]["default"], writeback);
    let pool = of("SSDPool");
    let spec = &pool["properties"]["spec"]["properties"];
    assert_eq!(spec["engine"]["default"], "IoUring");
    assert_eq!(spec["fallbackEngine"]["default"], "None");
    assert_eq!(spec["deletionPolicy"]["default"], "Retain");
}

#[test]
fn definitions_stay_below_the_size_limit() {
    for definition in definitions() {
        let bytes = serde_json::to_vec(&definition).expect("JSON").len();
        assert!(bytes <= DEFINITION_BYTES_MAX, "{}: {bytes} bytes", definition.spec.names.kind);
    }
}

#[test]
fn reference_pages_contain_every_field() {
    let files = generated::files();
    let mut offenders = Vec::new();
    for definition in definitions() {
        let name = format!("{}.md", definition.spec.names.kind.to_lowercase());
        let page = &files[&Path::new(generated::REFERENCE_FOLDER).join(&name)];
        walk("", &schema(&definition), &mut |path, _| {
            let path = path.trim_start_matches('.');
            let ours = path.starts_with("spec.") || path.starts_with("status.");
            if ours
                && !path.ends_with("[]")
                && !path.ends_with(".*")
                && !page.contains(&format!("| `{path}` |"))
            {
                offenders.push(format!("{name}: {path}"));
            }
        });
    }
    assert_none("every field is on the reference page of its kind", &offenders);
}
