//! Compares the Rust mirrors of shared types and constants with the BTF of the compiled objects. A type that is
//! changed only in C or only in Rust fails these tests.

use std::collections::BTreeMap;

use libbpf_rs::btf::types::{Enum, MemberAttr, Struct};
use libbpf_rs::{Btf, HasSize};
use zernel_phase::mirror::{EnumMirror, Mirrors, StructMirror};
use zernel_phase::{class, shared};

use crate::{capability, discovery, observer, overlay_layers, probes, twin};

/// The mirrors of the phase rules, which the twin is compiled with.
const PHASE_RULE_MIRRORS: &[Mirrors] = &[
    shared::MIRRORS,
    class::MIRRORS,
    twin::MIRRORS,
    Mirrors {
        structs: &[shared::TRACKER_CONFIG_MIRROR],
        enums: &[shared::EVENT_MIRROR],
    },
];

/// Calls `check` with each compiled BPF object and the Rust mirrors of its types.
fn for_each_object(check: impl Fn(&Btf<'_>, &[Mirrors])) {
    let [trace, scan] = discovery::OBJECTS_AND_MIRRORS;
    for (name, object, mirrors) in [
        trace,
        scan,
        ("observe", observer::OBSERVE_OBJECT, probes::MIRRORS),
        ("phase_twin", twin::TWIN_OBJECT, PHASE_RULE_MIRRORS),
        (
            "capability",
            capability::CAPABILITY_OBJECT,
            &[capability::MIRRORS],
        ),
        (
            "overlay_layers",
            overlay_layers::OVERLAY_OBJECT,
            &[overlay_layers::MIRRORS],
        ),
    ] {
        let btf = Btf::from_raw(name, object).expect("the object is readable");
        check(&btf.expect("the object carries BTF"), mirrors);
    }
}

/// How a mirror differs from the struct that the object was compiled with.
fn struct_difference(btf: &Btf<'_>, mirror: &StructMirror) -> Option<String> {
    let name = mirror.c_name;
    let Some(kernel) = btf.type_by_name::<Struct<'_>>(name) else {
        return Some(format!("BTF has no struct {name}"));
    };
    let fields = mirror.fields.iter();
    let ours = (
        mirror.size,
        fields.map(|(name, at)| ((*name).to_owned(), *at)).collect(),
    );
    let theirs = (kernel.size(), struct_members(&kernel));
    (ours != theirs).then(|| format!("{name}: Rust {ours:?}, C {theirs:?}"))
}

fn struct_members(kernel: &Struct<'_>) -> Vec<(String, usize)> {
    let members = kernel.iter().map(|member| {
        let MemberAttr::Normal { offset: bits } = member.attr else {
            panic!("{member:?} is a bit field");
        };
        let name = member.name.expect("every field has a name");
        (name.to_string_lossy().into_owned(), bits as usize / 8)
    });
    members.collect()
}

/// How a mirror differs from the enum that the object was compiled with.
fn enum_difference(btf: &Btf<'_>, mirror: &EnumMirror) -> Option<String> {
    let name = mirror.c_name;
    let Some(mut theirs) = enum_constants(btf, name) else {
        return Some(format!("BTF has no enum {name}"));
    };
    let values = mirror.values.iter();
    let ours: BTreeMap<_, _> = values
        .map(|(name, value)| ((*name).to_owned(), *value))
        .collect();
    if !mirror.is_complete {
        theirs.retain(|name, _| ours.contains_key(name));
    }
    (ours != theirs).then(|| format!("{name}: Rust {ours:?}, C {theirs:?}"))
}

fn enum_constants(btf: &Btf<'_>, name: &str) -> Option<BTreeMap<String, i64>> {
    let kernel = btf.type_by_name::<Enum<'_>>(name)?;
    let constants = kernel.iter().map(|constant| {
        let name = constant.name.expect("every constant has a name");
        (name.to_string_lossy().into_owned(), constant.value)
    });
    Some(constants.collect())
}

#[test]
fn mirrors_match_the_btf_of_the_objects() {
    for_each_object(|btf, mirrors| {
        let structs = mirrors.iter().flat_map(|mirrors| mirrors.structs);
        let enums = mirrors.iter().flat_map(|mirrors| mirrors.enums);
        let differences: Vec<_> = structs
            .filter_map(|mirror| struct_difference(btf, mirror))
            .chain(enums.filter_map(|mirror| enum_difference(btf, mirror)))
            .collect();
        assert!(differences.is_empty(), "{differences:#?}");
    });
}

#[test]
fn probe_numbers_match_the_kernel() {
    let btf = Btf::from_raw("observe", observer::OBSERVE_OBJECT)
        .unwrap()
        .unwrap();
    let ours = probes::PROBES.iter().map(|(folder, probe)| {
        let name = format!("ZERNEL_PROBE_{}", folder.to_uppercase());
        (name, *probe as i64)
    });
    assert_eq!(enum_constants(&btf, "zernel_probe"), Some(ours.collect()));
}

/// A field that is missing, renamed, moved or of another size is a difference.
#[test]
fn a_changed_struct_is_noticed() {
    for_each_object(|btf, mirrors| {
        for mirror in mirrors.iter().flat_map(|mirrors| mirrors.structs) {
            let differs = |size, fields: Vec<_>| {
                let kernel = mirror.c_name;
                let fields = fields.leak();
                let changed = StructMirror {
                    c_name: kernel,
                    size,
                    fields,
                };
                struct_difference(btf, &changed).is_some()
            };
            let (size, fields) = (mirror.size, mirror.fields.to_vec());
            let (last, others) = fields.split_last().expect("fields");
            assert!(differs(size + 8, fields.clone()), "{mirror:?}");
            assert!(differs(size, others.to_vec()), "{mirror:?}");
            for changed in [("renamed", last.1), (last.0, last.1 + 4)] {
                assert!(differs(size, [others, &[changed]].concat()), "{mirror:?}");
            }
        }
    });
}

/// A constant that is renamed, of another value, or missing from a complete list is a difference.
#[test]
fn a_changed_enum_is_noticed() {
    for_each_object(|btf, mirrors| {
        for mirror in mirrors.iter().flat_map(|mirrors| mirrors.enums) {
            let differs = |values: Vec<_>| {
                let values = values.leak();
                enum_difference(btf, &EnumMirror { values, ..*mirror }).is_some()
            };
            let (last, others) = mirror.values.split_last().expect("constants");
            for changed in [("RENAMED", last.1), (last.0, last.1 + 1)] {
                assert!(differs([others, &[changed]].concat()), "{mirror:?}");
            }
            assert_eq!(differs(others.to_vec()), mirror.is_complete, "{mirror:?}");
        }
    });
}
